// Package engine understands what inference engines say of their KV caches.
//
// A Batch decodes a payload of vLLM, SGLang or TensorRT-LLM, of any version,
// into Events of one form. A Mapping, one for each worker-rank, turns those into
// the events that kvindex's records carry:
//
//	var b engine.Batch
//	var out engine.Output
//	if err := b.Decode(payload, engine.Limits{}); err != nil {
//		// what follows the fault is lost, as in a gap
//	}
//	for i := range b.Events {
//		m.Apply(&b.Events[i], &out)
//	}
//
// # Shapes
//
// Payloads are decoded by the type of each value, not by version: a batch is an
// array of two elements or more, an event an array with its tag first or a map
// with the key type, a hash an integer with or without sign, bytes, or
// hexadecimal digits. What is not known is passed over and counted; an event
// that cannot be read is left out and counted, and the others stay. Nothing
// is allocated on the word of a length, and nothing recurses.
//
// # What is mapped
//
// Only what is certain: see Reason for all that is left out. Local hashes are
// computed from the tokens, the LoRA adapter's name, the cache salt, which vLLM
// says of a sequence's first block only and its children inherit, and the
// multimodal inputs. With EAGLE a block has the token after it too, which SGLang
// sends in bigrams and vLLM as one token of lookahead. Sequence hashes come from
// the parent, which the engine names by its own hash.
//
// Some things engines do not say at all: vLLM before 0.17 and SGLang before
// 0.5.18 no salts, vLLM before 0.17 no multimodal inputs, TensorRT-LLM's JSON and
// SGLang before 0.5.22 no LoRA adapter, SGLang in its default format no extra_key other than salt and
// adapter. Blocks of such requests cannot be told from plain ones; where the
// shape of an event shows it, they are counted as BlindBlocks.
package engine
