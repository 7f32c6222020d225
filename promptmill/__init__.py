"""promptmill: prompts in, trajectories out.

Reading order, which is also the way a sample goes:

    errors          what can go wrong, and what each outcome means for files and resume
    records         every record that crosses a file boundary
    flags, retry, endpoints, config
                    the table of options; which ended samples are run again; where requests go; options and
                    environment -> RunConfig
    door            what the command-line doors share
    batch_command   the batch command: signals and exit codes
    runner          BatchRunner: from options to a start of the run
    dataset         JSONL -> samples
    row_index, resume, owed
                    the rows that are there; which of them count; what is owed
    changes         what a resume may not change in passing
    preflight       what is settled before anything is made or called
    start           one start of a run: run what is owed, publish
    batches         owed samples -> batches
    engines/        where workers run: inline, processes
    worker          what one worker does with a batch
    agent           the loop: model call, tool calls, results, until an answer
    client, failures, verdicts
                    request and retry; what a failure means
    bodies, streaming, joining, joined_calls, replies, reasoning, tool_calls
                    reading what came back: JSON or a stream, then text, reasoning and calls
    limiter, deadlines
                    how many requests at once; a prompt's own time
    quirks/         what one server or model family does differently
    finished        a sample's end -> the row that is saved
    exports/        what a row looks like, here and in other formats
    rows            reading a saved row back: keys, identity, summary
    prices, budget, estimate
                    what calls cost; whether the run's limits let one more prompt start; what a dry run tells
    run_folder      every path of a run, and the one writer
    shards          append and read JSONL; replace a file whole
    checkpoint, filters, merge, statistics, publish
                    what a run folder is made of
    progress, escaping, secrets, logs, wording, summary
                    what a person sees while it runs, and at the end
    event_loop, resources
                    uvloop where there is one; what the operating system lets us have
    local_model, local_model_child, demo_model
                    the embedded model server and its demonstration model
    conversation, agent_command
                    AIAgent: one conversation outside any batch; its command
    verbs           what `python -m promptmill` does with a run folder
"""

__version__ = "0.1.0"
