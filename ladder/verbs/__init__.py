"""A file a verb, called like it. What does a verb's work, besides records/ and show/columns.py, which most of them use:

run         measure/runner.py, processes.py, device_rates.py, max_batch.py
report      show/tables.py, plots.py
compare     measure/fairness.py, contest.py, learning_rates.py; records/recipes.py; show/verdict.py
diff        rungs/lessons.py; show/lesson_text.py
try         measure/exercise.py
check       measure/machine_check.py
floor       count/kernels.py, floors.py
profile     measure/profiler.py
page        show/tutorial.py, page_text.py
propagate   rungs/carry.py, check_laws.py
"""
