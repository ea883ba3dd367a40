"""Where weights live: the seven verbs and what is behind them."""
