// This file serves the HTTP API of Dynamo's standalone KV indexer. An instance is
// its word for a worker.

package query

import (
	"context"
	"errors"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kvindex/index"
	pb "kvindex/pipeline/query/kvindexpb"
)

const dynamoBase = "/dynamo"

func (s *Server) mountDynamo(mux *http.ServeMux) {
	const replicas = "replicas are fed by Kafka, each by itself: there are no peers to register"
	s.mount(mux, dynamoBase, []dropinRoute{
		{dynamoMethod, http.MethodPost, "/query", s.asks(dynamoMethod, dynamoQueryFields, s.dynamoQuery)},
		{dynamoMethod, http.MethodPost, "/query_by_hash", s.asks(dynamoMethod, dynamoHashFields, s.dynamoByHash)},
		{dropinMethod, http.MethodGet, "/workers", s.dynamoWorkers},
		{dropinMethod, http.MethodGet, "/dump", s.dynamoDump},
		{dropinMethod, http.MethodPost, "/register", s.asks(dynamoMethod, dynamoRegisterFields, s.dynamoRegister)},
		{dropinMethod, http.MethodPost, "/unregister", s.asks(dynamoMethod, dynamoRegisterFields, s.dynamoUnregister)},
		{dropinMethod, http.MethodPost, "/register_peer", notHere(replicas)},
		{dropinMethod, http.MethodPost, "/deregister_peer", notHere(replicas)},
		{dropinMethod, http.MethodGet, "/peers", always(`[]`)},
		{dropinMethod, http.MethodPost, "/reopen_logs", always(`{"status":"ok"}`)}, // there are none
		{dropinMethod, http.MethodGet, "/health", always(`{"alive":true}`)},
	})
}

var (
	dynamoQueryFields = dropinFields{
		"token_ids":     tokensField,
		"model_name":    textField(intoModel),
		"lora_name":     textField(intoLoRA),
		"cache_salt":    textField(intoSalt),
		"routing_group": textField(intoGroup),
		"tenant_id":     textField(intoTenant),
		"block_size":    sizeField(intoSize), // not among theirs: tells models of one name apart
	}
	dynamoHashFields = dropinFields{
		"block_hashes":  hashesField,
		"model_name":    textField(intoModel),
		"cache_salt":    refuseField("it must be in the block_hashes already"),
		"lora_name":     refuseField("it must be in the block_hashes already"),
		"routing_group": textField(intoGroup),
		"tenant_id":     textField(intoTenant),
		"block_size":    sizeField(intoSize),
	}
	dynamoRegisterFields = dropinFields{
		"instance_id":     nameField(intoInstance),
		"model_name":      textField(intoModel),
		"endpoint":        passedOver,
		"routing_group":   textField(intoGroup),
		"tenant_id":       textField(intoTenant),
		"additional_salt": passedOver,
		"additionalsalt":  passedOver,
	}
)

func (s *Server) dynamoQuery(r *http.Request, in *dropinRequest, scratch *httpScratch) error {
	if len(in.tokens) == 0 {
		return invalid("token_ids is empty")
	}
	return s.dynamoAnswer(r, in, scratch)
}

// dynamoByHash answers for local hashes, as int64s or as uint64s.
func (s *Server) dynamoByHash(r *http.Request, in *dropinRequest, scratch *httpScratch) error {
	if len(in.hashes) == 0 {
		return invalid("block_hashes is empty")
	}
	return s.dynamoAnswer(r, in, scratch)
}

// dynamoAnswer leaves {scores: {instance: {rank: tokens}}, frequencies, instances:
// {instance: {longest_matched, gpu, dp: {rank: tokens}, cpu, disk}}}.
func (s *Server) dynamoAnswer(r *http.Request, in *dropinRequest, scratch *httpScratch) error {
	if in.group != "" && in.group != defaultGroup {
		return &httpError{http.StatusNotFound, "NOT_FOUND", "no indexer for model=" + in.model + " routing_group=" + in.group + ": every worker is in the group " + defaultGroup}
	}
	resp, err := s.match(r, in)
	if err != nil {
		return err
	}
	scores := append(scratch.out[:0], `{"scores":{`...)
	instances := append(scratch.more[:0], `},"frequencies":[],"instances":{`...)
	scored, first := false, true
	byWorker(resp.Matches, func(worker string, ranks []*pb.WorkerMatch) {
		if !first {
			instances = append(instances, ',')
		}
		first = false
		t := best(ranks)
		instances = appendString(instances, worker)
		instances = strconv.AppendUint(append(instances, `:{"longest_matched":`...), uint64(t.disk), 10)
		instances = strconv.AppendUint(append(instances, `,"gpu":`...), uint64(t.gpu), 10)
		instances = appendRanks(append(instances, `,"dp":`...), ranks)
		instances = strconv.AppendUint(append(instances, `,"cpu":`...), uint64(t.cpu), 10)
		instances = strconv.AppendUint(append(instances, `,"disk":`...), uint64(t.disk), 10)
		instances = append(instances, '}')

		// Scores are of device memory alone.
		ranks = slices.DeleteFunc(ranks, func(m *pb.WorkerMatch) bool { return tiersOf(m).gpu == 0 })
		if len(ranks) == 0 {
			return
		}
		if scored {
			scores = append(scores, ',')
		}
		scored = true
		scores = appendRanks(append(appendString(scores, worker), ':'), ranks)
	})
	scratch.more = instances
	scratch.out = append(append(scores, instances...), "}}"...)
	return nil
}

// defaultGroup is the routing group, and the tenant, that everything is in.
const defaultGroup = "default"

// dynamoWorkers lists the workers known. A row is a worker's ranks of one model.
func (s *Server) dynamoWorkers(_ http.ResponseWriter, r *http.Request, scratch *httpScratch) error {
	q := r.URL.Query()
	for name := range q {
		if name != "model_name" && name != "routing_group" && name != "tenant_id" {
			return invalid("unknown parameter %q: want model_name or routing_group", name)
		}
	}
	var workers []WorkerStatus
	if group := q.Get("routing_group"); group == "" || group == defaultGroup {
		workers = s.src.Workers(q.Get("model_name"))
	}
	workers = slices.DeleteFunc(slices.Clone(workers), func(w WorkerStatus) bool { return w.Retired })
	slices.SortFunc(workers, func(a, b WorkerStatus) int {
		if c := strings.Compare(a.Worker, b.Worker); c != 0 {
			return c
		}
		if c := strings.Compare(a.Model, b.Model); c != 0 {
			return c
		}
		if a.BlockSize != b.BlockSize {
			return a.BlockSize - b.BlockSize
		}
		return int(a.Rank) - int(b.Rank)
	})
	topic := s.src.Status().Events.Name
	dst := append(scratch.out[:0], '[')
	for from := 0; from < len(workers); {
		w, to := workers[from], from+1
		for to < len(workers) && workers[to].Worker == w.Worker && workers[to].Model == w.Model && workers[to].BlockSize == w.BlockSize {
			to++
		}
		if from > 0 {
			dst = append(dst, ',')
		}
		dst = appendDynamoWorker(dst, topic, workers[from:to])
		from = to
	}
	scratch.out = append(dst, ']')
	return nil
}

// appendDynamoWorker appends a row. A listener is what a rank's events come by.
func appendDynamoWorker(dst []byte, topic string, ranks []WorkerStatus) []byte {
	w := ranks[0]
	status := "paused"
	if slices.ContainsFunc(ranks, func(r WorkerStatus) bool { return !r.Silent }) {
		status = "active"
	}
	dst = appendInstance(append(dst, `{"instance_id":`...), w.Worker)
	dst = append(append(append(dst, `,"source":"kafka","status":"`...), status...), `","model_name":`...)
	dst = appendString(dst, w.Model)
	dst = append(append(append(dst, `,"routing_group":"`...), defaultGroup...), `","block_size":`...)
	dst = strconv.AppendInt(dst, int64(w.BlockSize), 10)
	dst = append(dst, `,"endpoints":{`...)
	for i, r := range ranks {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendString(append(appendRank(dst, r.Rank), ':'), origin(topic, r.Partition))
	}
	dst = append(dst, `},"listeners":{`...)
	for i, r := range ranks {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendString(append(appendRank(dst, r.Rank), `:{"endpoint":`...), origin(topic, r.Partition))
		status := "active"
		if r.Silent {
			status = "paused"
		}
		dst = append(append(append(dst, `,"status":"`...), status...), '"')
		if r.Incomplete {
			dst = append(dst, `,"last_error":"events were lost: it may hold more or less"`...)
		}
		dst = append(dst, '}')
	}
	return append(dst, "}}"...)
}

func appendRank(dst []byte, rank int32) []byte {
	return append(strconv.AppendInt(append(dst, '"'), int64(rank), 10), '"')
}

// origin is where a worker-rank's events come from.
func origin(topic string, partition int32) string {
	return "kafka:" + topic + "/" + strconv.Itoa(int(partition))
}

// appendInstance appends a worker's name: as the number that it writes, for instances
// have numbers there, or as a string.
func appendInstance(dst []byte, worker string) []byte {
	if _, rest, ok := parseUint([]byte(worker), math.MaxUint64); ok && len(rest) == 0 && worker[0] != '"' {
		return append(dst, worker...)
	}
	return appendString(dst, worker)
}

// What a dump may take: it is for looking into the index, and made in memory.
const (
	maxDumpBlocks = 1 << 18
	dumpDeadline  = 5 * time.Second
)

// dynamoDump leaves {"model:default": {block_size, events}}, an event being what a
// worker-rank stored. Without model_name it is of all models; instance_id and block_size, which
// Dynamo does not have, make it less.
func (s *Server) dynamoDump(_ http.ResponseWriter, r *http.Request, scratch *httpScratch) error {
	q := r.URL.Query()
	for name := range q {
		if name != "model_name" && name != "instance_id" && name != "block_size" {
			return invalid("unknown parameter %q: want model_name, instance_id or block_size", name)
		}
	}
	if ready := s.src.Readiness(); !ready.Ready {
		return notReady(ready)
	}
	size := uint64(0)
	if text := q.Get("block_size"); text != "" {
		v, rest, ok := parseUint([]byte(text), math.MaxInt32)
		if !ok || len(rest) > 0 {
			return invalid("block_size: %q is not a whole number from 0 to %d", text, math.MaxInt32)
		}
		size = v
	}
	var models []ModelStatus
	for _, m := range s.src.Status().Models {
		if name := q.Get("model_name"); name != "" && m.Model != name || size != 0 && m.BlockSize != int(size) {
			continue
		}
		if slices.ContainsFunc(models, func(other ModelStatus) bool { return other.Model == m.Model }) {
			return status.Errorf(codes.FailedPrecondition, "there are several models %q: give block_size", m.Model)
		}
		models = append(models, m)
	}
	if !s.dumping.TryLock() {
		return status.Error(codes.Unavailable, "another dump is under way")
	}
	defer s.dumping.Unlock()
	ctx, cancel := context.WithTimeout(r.Context(), dumpDeadline)
	defer cancel()
	dst, left := append(scratch.out[:0], '{'), maxDumpBlocks
	for i, m := range models {
		held, err := s.src.Dump(ctx, DumpFilter{Model: m.Model, BlockSize: m.BlockSize, Worker: q.Get("instance_id"), MaxBlocks: left})
		switch {
		case errors.Is(err, ErrDumpTooLarge):
			return status.Errorf(codes.FailedPrecondition, "a dump is of %d blocks at most, and there are more: give model_name or instance_id", maxDumpBlocks)
		case ctx.Err() != nil:
			return status.FromContextError(ctx.Err()).Err()
		case err != nil:
			return status.Error(codes.Internal, err.Error())
		}
		left -= Blocks(held)
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendString(dst, m.Model+":"+defaultGroup)
		dst = append(strconv.AppendInt(append(dst, `:{"block_size":`...), int64(m.BlockSize), 10), `,"events":[`...)
		for id, h := range held {
			if id > 0 {
				dst = append(dst, ',')
			}
			dst = appendDynamoEvent(dst, id, h)
		}
		dst = append(dst, "]}"...)
	}
	scratch.out = append(dst, '}')
	return nil
}

// dynamoTiers are the tiers' names there.
var dynamoTiers = [index.Tiers]string{"device", "host_pinned", "disk", "external"}

func appendDynamoEvent(dst []byte, id int, h Held) []byte {
	dst = appendInstance(append(dst, `{"worker_id":`...), h.Worker)
	dst = append(append(append(dst, `,"storage_tier":"`...), dynamoTiers[h.Tier]...), `","event":{"event_id":`...)
	dst = append(strconv.AppendInt(dst, int64(id), 10), `,"data":{"stored":{"parent_hash":`...)
	if h.Chain.HasParent {
		dst = strconv.AppendUint(dst, uint64(h.Chain.Parent), 10)
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(dst, `,"start_position":`...)
	if h.Chain.Position != index.NoPosition {
		dst = strconv.AppendInt(dst, int64(h.Chain.Position), 10)
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(dst, `,"blocks":[`...)
	first := true
	for b := range h.Chain.Singles() {
		if !first {
			dst = append(dst, ',')
		}
		first = false
		seq := index.SeqHash(b.Locals[0])
		switch {
		case len(b.Hashes) > 0:
			seq = b.Hashes[0]
		case b.HasParent:
			seq = index.Next(b.Parent, b.Locals[0])
		}
		dst = strconv.AppendUint(append(dst, `{"block_hash":`...), uint64(seq), 10)
		dst = strconv.AppendUint(append(dst, `,"tokens_hash":`...), uint64(b.Locals[0]), 10)
		dst = append(dst, '}')
	}
	dst = strconv.AppendInt(append(dst, `]}},"dp_rank":`...), int64(h.Rank), 10)
	return append(dst, "}}"...)
}

func (s *Server) dynamoRegister(r *http.Request, in *dropinRequest, scratch *httpScratch) error {
	scratch.code, scratch.out = http.StatusCreated, append(scratch.out[:0], `{"status":"ok"}`...)
	return s.registered(in)
}

func (s *Server) dynamoUnregister(r *http.Request, in *dropinRequest, scratch *httpScratch) error {
	if err := s.unregistered(in); err != nil {
		return err
	}
	return &httpError{http.StatusNotFound, "NOT_FOUND", "instance " + in.instance + " not found"}
}
