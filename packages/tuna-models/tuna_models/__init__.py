"""Models: import, plan of layouts, tasks, build. What imports TVM runs in a child process only."""
