"""The bundled schedules, one file each."""
