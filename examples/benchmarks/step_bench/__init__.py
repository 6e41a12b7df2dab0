"""What ``step.py`` measures, and how; the other scripts take their methods and models from here.

settings  of a measured process       run      a process per method and round
worker    one method in one process   report   table and plot
methods   what each method trains     models   shapes, published and pretrained, and their batches
"""
