"""Worker processes: take the device's lock, snapshot an execution, push it to central control, record what came of it."""
