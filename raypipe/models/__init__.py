"""Models that come with raypipe: functions that return a `raypipe.model.Model`. The modules load torch."""
