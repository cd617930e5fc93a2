"""What KV-cache bytes mean and where they lie.

`specs` lower each layer's cache to `fields` (meaning, in global units); `groups` decides which layers
share a block table; `layout` orders the axes; `geometry` combines these with a shard into the byte
address of everything one rank holds; `maps` is the run algebra between two geometries. All of that is
free of torch. `caches` allocates one int8 buffer and binds views of it; `block_pool` and `manager`
hand out blocks to requests.
"""
