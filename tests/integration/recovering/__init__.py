"""Physical backups of a fleet's nodes, recovered to cuts by the plans that `show --recovery-plan` prints."""
