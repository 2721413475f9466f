"""Modules:

- `cpkv.all_gather`: Phase 1: one prompt over many ranks: two ways to split a batch, and the plan of it
- `cpkv.alloc`: One holder a page, and a free list for each owner
- `cpkv.attention`: Sparse attention over a view: choose the keys of every query, then attend to those alone
- `cpkv.bench`: Numbers with a unit, taken on request and never in a test
- `cpkv.cli`: Options, JSON and exit codes; each command's work is in the chapter that it is about
- `cpkv.config`: What a model is made of, from its `config.json`: sizes, kinds of layers, rotation, weights
- `cpkv.demo`: A real document, a few prefill processes with one cache between them, and an oracle that checks every byte
- `cpkv.doctor`: What this machine has, what cpkv needs, and one line on how to mend what is missing
- `cpkv.draw`: Small pictures of pages, ranks and work, as text in the notebook
- `cpkv.engine`: Requests, chunks and one step that every rank runs alike
- `cpkv.evidence`: What a rank did to its pages: a list that costs a branch while nobody asks
- `cpkv.groups`: Ranks that are processes: one process group a lane
- `cpkv.handoff`: From prefill ranks that own pages to a decode process that wants them all, in order
- `cpkv.inspect`: A proof, from what the ranks wrote down, that the cache was sharded
- `cpkv.launch`: Start ranks, bring their results home, and leave nothing running
- `cpkv.laws`: Twelve laws of a sharded cache, and the errors that are named for them
- `cpkv.layout`: Which rank keeps which page, and where
- `cpkv.local`: Many ranks as threads that pass a baton
- `cpkv.measure`: Bytes, FLOPs, roofs, timers and differences
- `cpkv.model`: A DeepSeek-V3.2 and GLM-5 decoder in one generator per forward, and its checkpoints
- `cpkv.nextn`: The draft layer that ships with a model: one more layer of the same session, fed one token ahead
- `cpkv.ops.dense`: Row work whose bits do not depend on the batch
- `cpkv.ops.index`: Scores of the indexer, and the exact top-k of each row
- `cpkv.ops.quant`: Rows of 8-bit numbers and their scales, byte by byte
- `cpkv.ops.rows`: Encoded rows in pages: store, gather, restore
- `cpkv.ops.sparse`: Attention over the picked rows, and states that merge
- `cpkv.ops.table`: One table of verbs, chosen once, the same on every rank
- `cpkv.output`: The second gather moves only the rows that are sampled, unless the whole batch says otherwise
- `cpkv.pool`: What a token leaves behind, byte by byte, and the buffers that hold it
- `cpkv.radix`: Finds the pages of a prefix that somebody has computed before
- `cpkv.reader`: The seam between a model and its cache: a session a batch, four steps a layer, scratch by lease
- `cpkv.sample`: The next token from a row of logits, the same on every rank and in every batch
- `cpkv.schedule`: Which requests run together in a step, and what happens when they do not fit
- `cpkv.shared_kv`: Phase 2: one copy of the cache, sharded by page, and readers that attend as if it were whole
- `cpkv.tensors`: Named tensors in safetensors files: found by name, checked by their headers, read by memory map
- `cpkv.world`: The only way to other ranks"""

__version__ = "0.1.0"
