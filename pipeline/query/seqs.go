// This file answers for sequence hashes, by turning them into the local hashes that
// Match wants.

package query

import (
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kvindex/index"
)

// localsOf returns local hashes for a Match that answers as one of the whole prompt
// would, whose sequence hashes these are. It refuses, naming the field, what Match
// would refuse, and is as ready as Match: it must see at least what Match sees.
func (s *Service) localsOf(modelName string, blockSize uint32, field string, hashes []uint64) ([]uint64, error) {
	if modelName == "" {
		return nil, invalid("model is empty")
	}
	if len(hashes) > s.limits.MaxBlocks {
		return nil, tooMany(field, len(hashes), "blocks", s.limits.MaxBlocks)
	}
	ready := s.src.Readiness()
	if !ready.Ready {
		return nil, notReady(ready)
	}
	model, err := s.src.Model(modelName, int(blockSize), "")
	if err != nil {
		return nil, modelError(err, ready)
	}
	seqs := make([]index.SeqHash, len(hashes))
	for i, h := range hashes {
		seqs[i] = index.SeqHash(h)
	}
	locals, err := model.Index.Locals(make([]index.LocalHash, 0, len(seqs)), seqs)
	if errors.Is(err, index.ErrNoSeqs) {
		return nil, status.Errorf(codes.Unimplemented, "%s: model %q has opaque hashes, or the instance is not set to the structure that finds sequence hashes: ask with token_ids", field, modelName)
	}
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	if len(locals) == 0 {
		// Nobody has the first block, of which the local hash is known all the same.
		locals = append(locals, index.LocalHash(seqs[0]))
	}
	out := hashes[:0]
	for _, l := range locals {
		out = append(out, uint64(l))
	}
	return out, nil
}
