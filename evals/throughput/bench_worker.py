"""The process in which vLLM's own `vllm bench serve` runs: a command line in, its result file out, again and again.

Importing vLLM takes tens of seconds on a small machine, at the same time as a server that is to be measured; so it is
done once. Lines of JSON on standard input, {"arguments": [...]}, answered by {"error": null or a text}; what vLLM
prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    _answer(answers, None)
    for line in sys.stdin:
        error = None
        try:
            bench_serve(parser.parse_args(json.loads(line)["arguments"]))
        except KeyboardInterrupt:
            return
        except (Exception, SystemExit) as caught:
            error = f"{type(caught).__name__}: {caught}"
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        _answer(answers, error)


def _answer(stream: object, error: str | None) -> None:
    print(json.dumps({"error": error}), file=stream, flush=True)  # type: ignore[arg-type, call-overload]


if __name__ == "__main__":
    main()
