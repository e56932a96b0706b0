"""What a run shows of itself: metrics files, console lines, the report page, facts about the machine."""
