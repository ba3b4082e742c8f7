"""Two files of the same network, written by different tools: which value of one is which of the other.

`match.pair` pairs two graphs by quantisation, shape and place, never by position; `confirm` asks the numbers;
`feeds` brings one file's input to the other; `weights` says where their weights differ. `backends.paired` runs it.
"""
