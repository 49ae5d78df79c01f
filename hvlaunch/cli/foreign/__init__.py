"""Options of other launchers, and what they become here: a table, read where an option is met that hvlaunch does not have."""
