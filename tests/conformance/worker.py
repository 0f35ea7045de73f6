"""Compares job after job: a line of JSON in, a line out. A process, since XLA may abort."""

import serving  # first: it chooses the devices

# isort: split
import jobs

if __name__ == "__main__":
    serving.serve(lambda job: jobs.compared(jobs.Job(**job)))
