"""Names shared by the launcher and its processes: environment variables, exit codes."""

# What `launch` passes to the processes that it starts, in their environment.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = "KTD_COORDINATOR", "KTD_NUM_PROCESSES", "KTD_PROCESS_ID"
# The launcher's process id: its processes end when it is gone.
LAUNCHER = "KTD_LAUNCHER"
# The file for the step and the error of a process, without the ending.
REPORT = "KTD_REPORT"
# As sysexits.h has it: an error in a remote system, to be tried again; a service is not there.
EXIT_PEER, EXIT_UNAVAILABLE = 75, 69
# What a shell reports of a process that SIGTERM ended.
EXIT_TERMINATED = 143
