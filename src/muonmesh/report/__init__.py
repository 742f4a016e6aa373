"""Report: what an optimizer tells of its plan (`explain`) and of its last step (`metrics`)."""
