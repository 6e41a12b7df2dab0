"""The paper's experiments: one runner, its tables and its statistics.

    sources      data sets that are not on the hub      tasks        rows of a task
    metrics      scores                                 answers      the answer in a generated text
    settings     what one run is determined by          models       batches, predictions; classification, tagging
    generation   summarization, reasoning               methods      what of the model is trained
    training     one run: train, judge each epoch       suites       which runs an experiment is made of
    runs         a JSON line for each finished run      protocol     from runs to a score
    tables       scores as Markdown                     significance   intervals and tests
    run          the command                            analysis     where entries are selected, how far they move
    rules        sets of entries, by rows and columns   language     the bed for language models

Imports go from the bottom up: nothing here imports what is listed below it.
"""
