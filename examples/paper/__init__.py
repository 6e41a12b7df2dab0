"""The paper's experiments: one runner, its tables and its statistics.

    tasks      rows and metrics                       settings   what one run is determined by
    models     pretrained model and its new head      methods    what of it is trained
    training   one run: train, evaluate each epoch    suites     which runs an experiment is made of
    runs       a JSON line for each finished run      protocol   from runs to a score
    tables     scores as Markdown                     significance   intervals and tests
    run        the command

Imports go from the bottom up: nothing here imports what is listed below it.
"""
