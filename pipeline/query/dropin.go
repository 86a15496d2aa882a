// This file is what the APIs of other indexers have in common: how their paths are
// served, how they tell errors, and what of an answer they show.

package query

import (
	"net/http"
	"slices"
	"strings"

	pb "kvindex/pipeline/query/kvindexpb"
)

// dropinRoute is one path of such an API.
type dropinRoute struct {
	m      method
	verb   string
	path   string // below the API's base
	answer httpAnswer
}

// mount serves an API below base. A path that is not among the routes, or not with
// that verb, is refused in the API's own words.
func (s *Server) mount(mux *http.ServeMux, base string, routes []dropinRoute) {
	for _, r := range routes {
		mux.Handle(r.verb+" "+base+r.path, s.endpoint(r.m, r.verb, r.answer))
	}
	mux.HandleFunc(base+"/", func(w http.ResponseWriter, r *http.Request) {
		var verbs []string
		for _, route := range routes {
			if base+route.path == r.URL.Path {
				verbs = append(verbs, route.verb)
			}
		}
		err := &httpError{http.StatusNotFound, "NOT_FOUND", "nothing is at " + r.URL.Path}
		if len(verbs) > 0 {
			allowed := strings.Join(verbs, ", ")
			w.Header().Set("Allow", allowed)
			err = &httpError{http.StatusMethodNotAllowed, "METHOD_NOT_ALLOWED", r.URL.Path + " wants " + allowed}
		}
		writeError(w, &dropinError{err: err})
	})
}

// dropinError is an error as those APIs write it: {"error": text}, with our code
// beside it: as JSON, or packed as MessagePack.
type dropinError struct {
	err    error
	packed bool
}

func (e *dropinError) Error() string { return e.err.Error() }
func (e *dropinError) Unwrap() error { return e.err }

// always answers the same.
func always(body string) httpAnswer {
	return func(_ http.ResponseWriter, _ *http.Request, s *httpScratch) error {
		s.out = append(s.out[:0], body...)
		return nil
	}
}

// notHere refuses what has no meaning for an index that is fed by Kafka.
func notHere(why string) httpAnswer {
	return func(http.ResponseWriter, *http.Request, *httpScratch) error {
		return &httpError{http.StatusNotImplemented, "UNIMPLEMENTED", why}
	}
}

// dropinAnswer works out what was read and leaves its answer in s.out.
type dropinAnswer func(r *http.Request, in *dropinRequest, s *httpScratch) error

// asks reads a request of these fields, of the API that m is of, and answers it. Like
// Match it needs a place, if only because of its body.
func (s *Server) asks(m method, fields dropinFields, answer dropinAnswer) httpAnswer {
	return s.gated(func(_ http.ResponseWriter, r *http.Request, scratch *httpScratch) error {
		return s.parseAndAnswer(r, scratch, m, fields, answer)
	})
}

func (s *Server) parseAndAnswer(r *http.Request, scratch *httpScratch, m method, fields dropinFields, answer dropinAnswer) error {
	in := new(dropinRequest)
	unknown, err := in.read(scratch.in.Bytes(), fields)
	if err != nil {
		return err
	}
	if len(unknown) > 0 {
		s.in.ignoredFields(m, len(unknown))
		s.log.Debug("fields of a request are unknown and were ignored", "path", r.URL.Path, "fields", unknown)
	}
	return answer(r, in, scratch)
}

// match asks Match what the request does.
func (s *Server) match(r *http.Request, in *dropinRequest) (*pb.MatchResponse, error) {
	return s.service.Match(r.Context(), in.matchRequest())
}

func (in *dropinRequest) matchRequest() *pb.MatchRequest {
	req := &pb.MatchRequest{
		Model:       in.model,
		BlockSize:   in.blockSize,
		Tokens:      in.tokens,
		LocalHashes: in.hashes,
		Lora:        in.lora,
		Salt:        in.salt,
	}
	if in.instance != "" {
		req.Workers = []string{in.instance}
	}
	return req
}

// dropinTiers are leading tokens of a prompt by the farthest memory that was needed
// for them: cpu counts what gpu does and goes on in host memory, disk what cpu does
// and goes on with disk and external storage. So the last is the largest.
type dropinTiers struct{ gpu, cpu, disk uint32 }

func tiersOf(m *pb.WorkerMatch) dropinTiers {
	return dropinTiers{m.DepthTokens, m.DepthHostTokens, m.DepthExternalTokens}
}

// best is the best of each over all ranks of a worker.
func best(ranks []*pb.WorkerMatch) (t dropinTiers) {
	for _, r := range ranks {
		rank := tiersOf(r)
		t = dropinTiers{max(t.gpu, rank.gpu), max(t.cpu, rank.cpu), max(t.disk, rank.disk)}
	}
	return t
}

// byWorker sorts matches by worker and rank and calls f with the ranks of each. Of a
// worker-rank that is there twice, which may be for a moment while it moves from one
// partition to another, the deeper one counts.
func byWorker(matches []*pb.WorkerMatch, f func(worker string, ranks []*pb.WorkerMatch)) {
	slices.SortFunc(matches, func(a, b *pb.WorkerMatch) int {
		if c := strings.Compare(a.Worker, b.Worker); c != 0 {
			return c
		}
		if a.DpRank != b.DpRank {
			return int(a.DpRank) - int(b.DpRank)
		}
		return int(b.DepthExternalBlocks) - int(a.DepthExternalBlocks)
	})
	matches = slices.CompactFunc(matches, func(a, b *pb.WorkerMatch) bool { return a.Worker == b.Worker && a.DpRank == b.DpRank })
	for from := 0; from < len(matches); {
		to := from + 1
		for to < len(matches) && matches[to].Worker == matches[from].Worker {
			to++
		}
		f(matches[from].Worker, matches[from:to])
		from = to
	}
}

// knows reports whether a worker of that name, and of that model if it is not empty,
// has been heard and has not been retired.
func (s *Server) knows(worker, model string) bool {
	return slices.ContainsFunc(s.src.Workers(model), func(w WorkerStatus) bool { return w.Worker == worker && !w.Retired })
}
