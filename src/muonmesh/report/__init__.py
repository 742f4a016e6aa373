"""Report: describes an optimizer's plan (`explain`) and its last step (`metrics`)."""
