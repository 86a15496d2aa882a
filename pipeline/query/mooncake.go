// This file serves the indexer API of Mooncake's Conductor (its RFC 1403). Tenants
// and instances are its words: an instance is a worker here, and a tenant a name that
// answers are given under.

package query

import (
	"net/http"
	"strconv"

	pb "kvindex/pipeline/query/kvindexpb"
)

const mooncakeBase = "/mooncake"

func (s *Server) mountMooncake(mux *http.ServeMux) {
	s.mount(mux, mooncakeBase, []dropinRoute{
		{mooncakeMethod, http.MethodPost, "/query", either(s.asks(mooncakeMethod, mooncakeQueryFields, s.mooncakeQuery), s.asksPacked(conductorQueryFields(s.limits), s.conductorQuery))},
		{mooncakeMethod, http.MethodPost, "/query_by_hash", s.asks(mooncakeMethod, mooncakeHashFields, s.mooncakeByHash)},
		{dropinMethod, http.MethodPost, "/register", either(s.asks(mooncakeMethod, mooncakeRegisterFields, s.mooncakeRegister), s.asksPacked(conductorRegisterFields, s.conductorRegister))},
		{dropinMethod, http.MethodPost, "/unregister", either(s.asks(mooncakeMethod, mooncakeRegisterFields, s.mooncakeUnregister), s.asksPacked(conductorUnregisterFields, s.conductorUnregister))},
		{dropinMethod, http.MethodGet, "/health", always(`{"alive":true}`)},
	})
}

// What the fields of all requests are read into.
var (
	intoModel    = func(in *dropinRequest) *string { return &in.model }
	intoLoRA     = func(in *dropinRequest) *string { return &in.lora }
	intoSalt     = func(in *dropinRequest) *string { return &in.salt }
	intoTenant   = func(in *dropinRequest) *string { return &in.tenant }
	intoGroup    = func(in *dropinRequest) *string { return &in.group }
	intoInstance = func(in *dropinRequest) *string { return &in.instance }
	intoSize     = func(in *dropinRequest) *uint32 { return &in.blockSize }
)

var (
	mooncakeQueryFields = dropinFields{
		"model":       textField(intoModel),
		"lora_name":   textField(intoLoRA),
		"lora_id":     refuseField("adapters are known by lora_name", "-1"),
		"token_ids":   tokensField,
		"tenant_id":   textField(intoTenant),
		"instance_id": nameField(intoInstance),
		"block_size":  sizeField(intoSize),
		"cache_salt":  textField(intoSalt),
		"medium":      passedOver, // of the RFC's first draft: every medium is answered
	}
	mooncakeHashFields = dropinFields{
		"model":       textField(intoModel),
		"seq_hashes":  hashesField,
		"block_hash":  hashesField, // the earlier drafts' name
		"tenant_id":   textField(intoTenant),
		"instance_id": nameField(intoInstance),
		"block_size":  sizeField(intoSize),
		"lora_name":   passedOver, // these three are in the hashes
		"lora_id":     passedOver,
		"cache_salt":  passedOver,
		"medium":      passedOver,
	}
	mooncakeRegisterFields = dropinFields{
		"modelname":      textField(intoModel),
		"instance_id":    nameField(intoInstance),
		"endpoint":       passedOver,
		"tenant_id":      textField(intoTenant),
		"lora_name":      passedOver,
		"additionalsalt": passedOver,
	}
)

func (s *Server) mooncakeQuery(r *http.Request, in *dropinRequest, scratch *httpScratch) error {
	if len(in.tokens) == 0 {
		return invalid("token_ids is empty")
	}
	return s.mooncakeAnswer(r, in, scratch)
}

func (s *Server) mooncakeByHash(r *http.Request, in *dropinRequest, scratch *httpScratch) error {
	if len(in.hashes) == 0 {
		return invalid("seq_hashes is empty")
	}
	locals, err := s.service.localsOf(in.model, in.blockSize, "seq_hashes", in.hashes)
	if err != nil {
		return err
	}
	in.hashes = locals
	return s.mooncakeAnswer(r, in, scratch)
}

// mooncakeAnswer leaves {tenant: {instance: {longest_matched, GPU, DP, CPU, DISK}}},
// in tokens. Instances that hold nothing of the prompt are absent, but not one that
// was asked for by name.
func (s *Server) mooncakeAnswer(r *http.Request, in *dropinRequest, scratch *httpScratch) error {
	resp, err := s.match(r, in)
	if err != nil {
		return err
	}
	tenant := in.tenant
	if tenant == "" {
		tenant = "default"
	}
	dst := append(appendString(append(scratch.out[:0], '{'), tenant), ":{"...)
	if len(resp.Matches) == 0 && in.instance != "" {
		dst = appendMooncake(dst, in.instance, nil)
	}
	first := true
	byWorker(resp.Matches, func(worker string, ranks []*pb.WorkerMatch) {
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = appendMooncake(dst, worker, ranks)
	})
	scratch.out = append(dst, "}}"...)
	return nil
}

func appendMooncake(dst []byte, worker string, ranks []*pb.WorkerMatch) []byte {
	t := best(ranks)
	dst = appendString(dst, worker)
	dst = strconv.AppendUint(append(dst, `:{"longest_matched":`...), uint64(t.disk), 10)
	dst = strconv.AppendUint(append(dst, `,"GPU":`...), uint64(t.gpu), 10)
	dst = appendRanks(append(dst, `,"DP":`...), ranks)
	dst = strconv.AppendUint(append(dst, `,"CPU":`...), uint64(t.cpu), 10)
	dst = strconv.AppendUint(append(dst, `,"DISK":`...), uint64(t.disk), 10)
	return append(dst, '}')
}

// appendRanks appends {rank: tokens in device memory}.
func appendRanks(dst []byte, ranks []*pb.WorkerMatch) []byte {
	dst = append(dst, '{')
	for i, m := range ranks {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(append(dst, '"'), int64(m.DpRank), 10)
		dst = strconv.AppendUint(append(dst, `":`...), uint64(tiersOf(m).gpu), 10)
	}
	return append(dst, '}')
}

// mooncakeRegister says yes to what is so already: workers are known by their events.
func (s *Server) mooncakeRegister(r *http.Request, in *dropinRequest, scratch *httpScratch) error {
	if err := s.registered(in); err != nil {
		return err
	}
	scratch.out = append(appendString(append(scratch.out[:0], `{"status":"registered successfully","instance_id":`...), in.instance), '}')
	return nil
}

func (s *Server) mooncakeUnregister(r *http.Request, in *dropinRequest, scratch *httpScratch) error {
	if err := s.unregistered(in); err != nil {
		return err
	}
	scratch.out = append(scratch.out[:0], `{"status":"unregistered successfully","removed_instances":[]}`...)
	return nil
}

// registered fails unless the worker is known.
func (s *Server) registered(in *dropinRequest) error {
	if in.instance == "" {
		return invalid("instance_id is empty")
	}
	if s.knows(in.instance, in.model) {
		return nil
	}
	return &httpError{http.StatusConflict, "FAILED_PRECONDITION", "no events of " + strconv.Quote(in.instance) + " have come from Kafka yet: " +
		"workers are known by them and not by being registered, so run a relay or a producer for it"}
}

// unregistered fails unless the worker is not known.
func (s *Server) unregistered(in *dropinRequest) error {
	if in.instance == "" {
		return invalid("instance_id is empty")
	}
	if !s.knows(in.instance, in.model) {
		return nil
	}
	return &httpError{http.StatusNotImplemented, "UNIMPLEMENTED", strconv.Quote(in.instance) + " stays known until its producer retires it, or it has been silent for the worker TTL"}
}
