"""What an actor measures: layers, links, memory and its own windows."""
