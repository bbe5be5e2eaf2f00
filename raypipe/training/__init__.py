"""What a run is made of: its strategy, its windows, its report and its folder."""
