"""One optimizer step on this rank; README.md in this folder has the modules in the order in which a step uses them."""
