"""The glue: the option, how the choice travels, that it is in force. Needs vLLM; the mark `engine`: starts engines."""
