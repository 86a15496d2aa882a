// This file serves what later revisions of Mooncake's Conductor speak, under the same
// paths: MessagePack, answers by instance without a tenant, and a row for each
// worker-rank that is known, whether it holds anything of the prompt or not.

package query

import (
	"mime"
	"net/http"
	"strconv"

	"github.com/tinylib/msgp/msgp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

const packedMedia = "application/msgpack"

// either has requests in MessagePack answered, and refused, in it.
func either(inJSON, inPacked httpAnswer) httpAnswer {
	return func(w http.ResponseWriter, r *http.Request, scratch *httpScratch) error {
		if media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err == nil && media == packedMedia {
			scratch.packed = true
			return inPacked(w, r, scratch)
		}
		return inJSON(w, r, scratch)
	}
}

// asksPacked is asks of a request in MessagePack.
func (s *Server) asksPacked(fields packedFields, answer dropinAnswer) httpAnswer {
	return s.gated(func(_ http.ResponseWriter, r *http.Request, scratch *httpScratch) error {
		in := new(dropinRequest)
		if err := in.readPacked(scratch.in.Bytes(), fields); err != nil {
			return err
		}
		return answer(r, in, scratch)
	})
}

// conductorQuery leaves {instances: {instance: {longest_matched, dp: {rank: tokens},
// rank_matches: {rank: {gpu, cpu, disk}}, gpu, cpu, disk}}}, in tokens. Of a model that
// nobody has there are no instances.
func (s *Server) conductorQuery(r *http.Request, in *dropinRequest, scratch *httpScratch) error {
	var matches []*pb.WorkerMatch
	if len(in.tokens) > 0 {
		resp, err := s.match(r, in)
		if err != nil && status.Code(err) != codes.NotFound {
			return err
		}
		matches = resp.GetMatches()
	} else if ready := s.src.Readiness(); !ready.Ready {
		return notReady(ready)
	}
	known := s.src.Workers(in.model)
	rows := make([]pb.WorkerMatch, len(known)) // byWorker drops those that Match has
	for i, w := range known {
		if w.BlockSize == int(in.blockSize) && !w.Silent && !w.Retired && (in.instance == "" || in.instance == w.Worker) {
			rows[i].Worker, rows[i].DpRank = w.Worker, w.Rank
			matches = append(matches, &rows[i])
		}
	}
	instances, n := scratch.more[:0], uint32(0)
	byWorker(matches, func(worker string, ranks []*pb.WorkerMatch) {
		instances = appendConductor(instances, worker, ranks)
		n++
	})
	scratch.more = instances
	dst := msgp.AppendString(msgp.AppendMapHeader(scratch.out[:0], 1), "instances")
	scratch.out = append(msgp.AppendMapHeader(dst, n), instances...)
	return nil
}

func appendConductor(dst []byte, worker string, ranks []*pb.WorkerMatch) []byte {
	t := best(ranks)
	dst = msgp.AppendMapHeader(msgp.AppendString(dst, worker), 6)
	dst = appendPackedSize(dst, "longest_matched", t.disk)
	dst = msgp.AppendMapHeader(msgp.AppendString(dst, "dp"), uint32(len(ranks)))
	for _, m := range ranks {
		dst = appendPackedSize(dst, strconv.Itoa(int(m.DpRank)), tiersOf(m).gpu)
	}
	dst = msgp.AppendMapHeader(msgp.AppendString(dst, "rank_matches"), uint32(len(ranks)))
	for _, m := range ranks {
		dst = msgp.AppendMapHeader(msgp.AppendString(dst, strconv.Itoa(int(m.DpRank))), 3)
		dst = appendPackedTiers(dst, tiersOf(m))
	}
	return appendPackedTiers(dst, t)
}

func appendPackedTiers(dst []byte, t dropinTiers) []byte {
	return appendPackedSize(appendPackedSize(appendPackedSize(dst, "gpu", t.gpu), "cpu", t.cpu), "disk", t.disk)
}

func appendPackedSize(dst []byte, name string, tokens uint32) []byte {
	return msgp.AppendUint32(msgp.AppendString(dst, name), tokens)
}

// conductorRegister says yes to what is so already, as mooncakeRegister does.
func (s *Server) conductorRegister(_ *http.Request, in *dropinRequest, scratch *httpScratch) error {
	if err := s.registered(in); err != nil {
		return err
	}
	dst := msgp.AppendString(msgp.AppendMapHeader(scratch.out[:0], 2), "status")
	dst = msgp.AppendString(msgp.AppendString(dst, "registered successfully"), "instance_id")
	scratch.out = msgp.AppendString(dst, in.instance)
	return nil
}

func (s *Server) conductorUnregister(_ *http.Request, in *dropinRequest, _ *httpScratch) error {
	if err := s.unregistered(in); err != nil {
		return err
	}
	tenant := in.tenant
	if tenant == "" {
		tenant = defaultGroup
	}
	return &httpError{http.StatusNotFound, "NOT_FOUND", "service not found: " + in.instance + "|" + tenant + "|" + strconv.Itoa(int(in.rank))}
}

// appendPackedError appends {error: text, code} and, of a request that is wrong, what
// the Conductor says besides.
func appendPackedError(dst []byte, text, code string, why *packedRefusal) []byte {
	if why == nil {
		why = &packedRefusal{index: -1}
	}
	size := uint32(2)
	for _, more := range []bool{why.reason != "", why.field != "", why.index >= 0} {
		if more {
			size++
		}
	}
	dst = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(dst, size), "error"), text)
	dst = msgp.AppendString(msgp.AppendString(dst, "code"), code)
	if why.reason != "" {
		dst = msgp.AppendString(msgp.AppendString(dst, "reason"), why.reason)
	}
	if why.field != "" {
		dst = msgp.AppendString(msgp.AppendString(dst, "field"), why.field)
	}
	if why.index >= 0 {
		dst = msgp.AppendInt(msgp.AppendString(dst, "index"), why.index)
	}
	return dst
}
