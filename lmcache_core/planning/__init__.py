"""What pays, worked out before anything is built: closed forms for transfers, prefill and offloading. All of it is
pure; `lmcache-core plan` prints it.

| module | what it is |
|---|---|
| `quantities` | bandwidths, speeds of computing and large numbers as people write them |
| `shape` | what of a model's config.json decides the size of its KV and the work of a prefill |
| `forms` | transfer time and size, work and time of a prefill, the length from which loading pays |
| `measured` | the line through what `lmcache-core bench tier` has measured |
| `stalls` | how large a window of offloading must be for how few stalls |
| `window` | that window over an engine's free pages |
"""
