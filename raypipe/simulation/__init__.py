"""The discrete-event simulator and what it needs to know: times and bytes of Ops and messages."""
