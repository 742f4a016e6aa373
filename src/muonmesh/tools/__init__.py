"""Tools beside the optimizer: command line, audit, conversion, forecasts. The core imports none of them."""
