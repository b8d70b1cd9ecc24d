"""Many runs for one question: comparing methods, and tuning them alike."""
