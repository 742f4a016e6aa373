"""Tools beside the optimizer: command line, audit, conversion, forecasts, dry run. The core imports none of them."""
