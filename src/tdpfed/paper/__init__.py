"""The paper's experiments (section VII): its tables and figures made anew, its numbers beside ours."""
