"""`kvplug ab bench`: two servers loaded in turn with the same requests, and compared pair by pair.

    options       what was asked for, checked before anything starts
    workloads     what a run sends, from a seed alone; mooncake reads a trace
    vocabulary    words that stay one token each
    loads         a run's requests, and which client sends them
    bench_client  vLLM's own `vllm bench serve`, kept up in the process of bench_worker
    stream_client our own client, for arrival times and conversations
    run_result    what a client measured, in the shape of vLLM's
    memory        whether both servers fit
    statistics    paired ratios, their interval, the verdict
    summary       from runs to metrics and sentences
    bench_runs    servers and clients, started and loaded in turn; run_progress shows how far they are
    pairs         the comparison, from options to report

Only bench_worker imports vLLM, in a process of its own.
"""
