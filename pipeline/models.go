// This file keeps an index for each model.

package pipeline

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"kvindex/index"
	"kvindex/pipeline/query"
)

// modelKey names an index. Block size and hasher are part of it: the same
// prompt has other hashes under another block size, so two fleets that serve
// one model differently are two indexes, never one with wrong answers.
type modelKey struct {
	name      string
	blockSize int32
	hasher    index.Hasher
}

// withoutIndex returns a model that names the index of no worker-rank.
func (k modelKey) withoutIndex() *query.Model {
	return &query.Model{Name: k.name, BlockSize: int(k.blockSize), Hasher: k.hasher}
}

// models holds an index per model, as long as a worker-rank is of it: which models
// there are is then the same before and after a restart. Reading is free of locks.
type models struct {
	allowed []ModelConfig // empty: any
	limit   int
	make    func(index.Hasher) index.Structure

	mu     sync.Mutex                                // held while one comes or goes
	users  map[*query.Model]int                      // worker-ranks; one more of what is configured
	byName atomic.Pointer[map[string][]*query.Model] // replaced whole
}

func newModels(cfg *Config) *models {
	m := &models{allowed: cfg.Models, limit: cfg.MaxModels, make: cfg.structure, users: map[*query.Model]int{}}
	m.byName.Store(&map[string][]*query.Model{})
	// Configured models are always there, so that asking for one is not an error
	// while no worker has it.
	for _, c := range cfg.Models {
		m.get(modelKey{c.Name, int32(c.BlockSize), c.Hasher})
	}
	return m
}

// get returns the index of a key for one worker-rank, until release, made if it is the
// first; or allow's error.
func (m *models) get(k modelKey) (*query.Model, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.allow(k); err != nil {
		return nil, err
	}
	x := m.find(k)
	if x == nil {
		x = &query.Model{Name: k.name, BlockSize: int(k.blockSize), Hasher: k.hasher, Index: index.New(m.make(k.hasher))}
		next := maps.Clone(*m.byName.Load())
		next[k.name] = append(slices.Clip(next[k.name]), x)
		m.byName.Store(&next)
	}
	m.users[x]++
	return x, nil
}

// release gives back what get returned. The index goes with its last worker-rank.
func (m *models) release(x *query.Model) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users[x]--; m.users[x] > 0 {
		return
	}
	delete(m.users, x)
	next := maps.Clone(*m.byName.Load())
	if left := slices.DeleteFunc(slices.Clone(next[x.Name]), func(y *query.Model) bool { return x == y }); len(left) > 0 {
		next[x.Name] = left
	} else {
		delete(next, x.Name)
	}
	m.byName.Store(&next)
}

// allow returns an error if the settings do not let the key's index be made.
func (m *models) allow(k modelKey) error {
	if m.find(k) != nil {
		return nil
	}
	if len(m.allowed) > 0 && !slices.Contains(m.allowed, ModelConfig{k.name, int(k.blockSize), k.hasher}) {
		return fmt.Errorf("model %q with blocks of %d tokens and hasher %s is not among those configured", k.name, k.blockSize, k.hasher)
	}
	return m.room(k)
}

// room returns an error if there are as many models as there may be.
func (m *models) room(k modelKey) error {
	if n := len(m.all()); n >= m.limit {
		return fmt.Errorf("model %q would be number %d: the limit is %d models", k.name, n+1, m.limit)
	}
	return nil
}

func (m *models) find(k modelKey) *query.Model {
	for _, x := range (*m.byName.Load())[k.name] {
		if x.BlockSize == int(k.blockSize) && x.Hasher == k.hasher {
			return x
		}
	}
	return nil
}

// resolve finds the model a query means. blockSize 0 and hasher "" mean the only one.
func (m *models) resolve(name string, blockSize int, hasher string) (query.Model, error) {
	var found *query.Model
	var have []string // all of them, once there are several
	for _, x := range (*m.byName.Load())[name] {
		if blockSize != 0 && x.BlockSize != blockSize || hasher != "" && x.Hasher.String() != hasher {
			continue
		}
		if found != nil {
			if have == nil {
				have = append(have, found.String())
			}
			have = append(have, x.String())
			continue
		}
		found = x
	}
	if have != nil {
		return query.Model{}, fmt.Errorf("%w %.256q: there are %s", query.ErrAmbiguousModel, name, strings.Join(have, ", "))
	}
	if found == nil {
		return query.Model{}, fmt.Errorf("%w %.256q", query.ErrUnknownModel, name) // many clients take 8 KiB of trailers
	}
	return *found, nil
}

// all lists the models, in no order.
func (m *models) all() []*query.Model {
	var out []*query.Model
	for _, xs := range *m.byName.Load() {
		out = append(out, xs...)
	}
	return out
}
