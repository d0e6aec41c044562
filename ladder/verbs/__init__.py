"""A file a verb, called like it. What does a verb's work, besides what most of them use (records/, show/columns.py):

run         measure/script_flags.py, runner.py, run_folder.py, processes.py, device_rates.py, max_batch.py
report      show/print_report.py, documents.py, plots.py
compare     measure/contest.py, fairness.py, learning_rates.py; records/recipes.py; show/verdict.py
diff        rungs/lessons.py; show/lesson_text.py
try         measure/exercise.py
check       measure/machine_check.py
floor       count/kernels.py, floors.py
profile     measure/profiler.py
page        show/html_page.py, page_text.py
propagate   rungs/carry.py, check_laws.py
"""
