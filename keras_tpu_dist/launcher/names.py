"""Names shared by the launcher and its processes: environment variables, exit codes."""

# Environment variables that `launch` sets for its processes.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = "KTD_COORDINATOR", "KTD_NUM_PROCESSES", "KTD_PROCESS_ID"
# The launcher's process id: its processes end when it is gone.
LAUNCHER = "KTD_LAUNCHER"
# The file for the step and the error of a process, without its ending.
REPORT = "KTD_REPORT"
# From sysexits.h: a temporary failure in a remote system; an unavailable service.
EXIT_PEER, EXIT_UNAVAILABLE = 75, 69
# A shell's exit code for a process that SIGTERM ended.
EXIT_TERMINATED = 143
