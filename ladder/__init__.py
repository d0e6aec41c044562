"""The tool around the ladder, in six rooms; each imports only from those below it, which tests/test_rooms.py holds.

    verbs               a file a verb, called like it: its flags, its `main`
    show     measure    terminal, Markdown, pictures, the page; what starts processes
    records             a log's text to tables, their statistics, impossible numbers
    count               FLOPs, bytes, floors, cards, memory
    rungs               the list of rungs, their laws

errors.py, files.py and formats.py, which has all formats of numbers, are for every room.
What reads logs loads no torch.
"""
