_progress = {"global_counter": -1.0}


def update_progress(kind, value):
    _progress[kind] = float(value)


def update_all_progresses(progresses):
    _progress.update(progresses)


def get_progress(kind):
    return _progress[kind]


def get_all_progresses():
    return _progress
