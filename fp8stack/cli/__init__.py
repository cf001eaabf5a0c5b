"""The commands of the program `fp8stack` (`python -m fp8stack`), a module each.

The command `plan` is

    parsers.add_plan(commands)    adds it and its options with `output.add_command`, without torch
    plan.run(options) -> int      does it and returns the exit status: 0, or 1 where the answer is no

What a user gave that is wrong is raised as an fp8stack error: the program says it in one line on stderr, with exit
status 2. Results go through `output.show`: a table, or with --json one JSON object on stdout and nothing else.
"""
