"""Nothing is lost: the runner is killed everywhere, the disk refuses, files are torn, datasets change; it resumes.

    points          where a process kills itself: the calls by which a run folder is written
    harness         a warm process that forks a child for each run to kill
    scripts         the scripted model, which counts its requests by run and start
    folders         what a run folder holds, read with nothing of the product's
    tallies         what one start of a run asked for and put on disk, and what must hold between the two

`PROMPTMILL_CRASHES=N` makes N times as many cases, N times as random; the default of 1 is what CI runs.
"""
