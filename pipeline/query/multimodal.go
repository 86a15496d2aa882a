// This file reads the multimodal inputs of a request.

package query

import (
	"kvindex/index"
	pb "kvindex/pipeline/query/kvindexpb"
)

// multimodal fills m.mm with the request's multimodal inputs.
func (m *matcher) multimodal(req *pb.MatchRequest) error {
	m.mm = m.mm[:0]
	for i, in := range req.Mm {
		hash := in.Hash
		if id, ok := index.MMIdentifier(in.Id); ok {
			if hash != 0 {
				return invalid("mm[%d]: give either hash or id", i)
			}
			hash = id
		}
		if in.Tokens == 0 {
			return invalid("mm[%d]: tokens is 0", i)
		}
		end := int(in.FirstToken) + int(in.Tokens)
		if end > len(req.Tokens) {
			return invalid("mm[%d]: ends at token %d of %d", i, end, len(req.Tokens))
		}
		m.mm = append(m.mm, index.MMHash{Hash: hash, Start: int(in.FirstToken), End: end})
	}
	return nil
}
