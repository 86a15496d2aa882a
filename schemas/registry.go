package schemas

// This file decodes event records of any known writer schema.

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"

	"github.com/linkedin/goavro/v2"
)

// Registry holds the writer schemas that a reader of event records knows; the
// current one is always among them. Its methods may be called from any
// goroutine.
type Registry struct {
	limits Limits

	mu    sync.RWMutex
	known map[uint64]*goavro.Codec // by fingerprint; guarded by mu
}

// NewRegistry returns a Registry that knows only the current schema and keeps
// to the limits.
func NewRegistry(l Limits) *Registry {
	return &Registry{
		limits: l.withDefaults(),
		known:  map[uint64]*goavro.Codec{batchSchema.Rabin: batchSchema.Codec},
	}
}

// Add makes a writer schema of event records known, in Avro's JSON, and returns
// its fingerprint. It refuses schemas that goavro does and those in which few
// bytes can ask for much memory or stack: recursive ones, and arrays of items
// that take no bytes.
func (g *Registry) Add(schema string) (uint64, error) {
	var parsed any
	if err := json.Unmarshal([]byte(schema), &parsed); err != nil {
		return 0, fmt.Errorf("writer schema: %w", err)
	}
	if _, err := (sizer{}).empty(parsed); err != nil {
		return 0, fmt.Errorf("writer schema: %w", err)
	}
	c, err := goavro.NewCodec(schema)
	if err != nil {
		return 0, fmt.Errorf("writer schema: %w", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.known[c.Rabin] = c
	return c.Rabin, nil
}

// DecodeBatch decodes a record of any known schema into b: as Batch.Decode does
// if it is the current one, else through goavro, which costs some forty times
// as much and allocates up to 400 bytes for each byte of the record. There, fields are
// matched by name: a missing one has the default that the current schema gives it, one
// without default is ErrInvalid, and unknown ones are ignored. An unknown kind of event is
// ErrInvalid, since what it changes cannot be known.
func (g *Registry) DecodeBatch(b *Batch, value []byte) error {
	fp, err := fingerprint(value)
	if err != nil || fp == batchSchema.Rabin {
		return b.decode(value, g.limits)
	}
	b.reset()
	native, err := g.Native(value)
	if err == nil {
		err = b.fromNative(native, g.limits)
	}
	if err != nil {
		b.Events = b.Events[:0]
		return fmt.Errorf("event record: schema %016x: %w", fp, err)
	}
	return nil
}

// Native decodes an event record of any known schema with goavro alone, into
// goavro's own types: maps by field name, and unions as maps by type name. Its
// bytes alias value. Unlike Batch.Decode it takes integers longer than their
// type, strings that are not UTF-8, and wrong block sizes; see the package
// comment. Errors: ErrMagic, ErrUnknownSchema, ErrTooLarge, ErrLeftover, and
// ErrInvalid for whatever goavro refuses.
func (g *Registry) Native(value []byte) (map[string]any, error) {
	fp, err := fingerprint(value)
	if err != nil {
		return nil, err
	}
	g.mu.RLock()
	c := g.known[fp]
	g.mu.RUnlock()
	if c == nil {
		return nil, &UnknownSchemaError{Fingerprint: fp}
	}
	return native(c, value, g.limits)
}

// GoavroDecode decodes an event record of the current schema with goavro alone;
// see Registry.Native. It is for checks that must not share the hot decoder's
// mistakes.
func GoavroDecode(value []byte) (map[string]any, error) {
	if fp, err := fingerprint(value); err != nil {
		return nil, err
	} else if fp != batchSchema.Rabin {
		return nil, &UnknownSchemaError{Fingerprint: fp}
	}
	return native(batchSchema.Codec, value, DefaultLimits)
}

// native decodes a framed value of c's schema.
func native(c *goavro.Codec, value []byte, l Limits) (map[string]any, error) {
	if len(value) > l.MaxRecordBytes {
		return nil, fmt.Errorf("%w: record of %d bytes, limit %d", ErrTooLarge, len(value), l.MaxRecordBytes)
	}
	datum, rest, err := c.NativeFromBinary(value[headerBytes:])
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if len(rest) > 0 {
		return nil, fmt.Errorf("%w: %d", ErrLeftover, len(rest))
	}
	m, ok := datum.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("%w: %T in place of a record", ErrInvalid, datum)
	}
	return m, nil
}

// sizer tells of named types, by name without namespace, whether values of
// theirs can take no bytes. A nil entry is a type still being defined.
type sizer map[string]*bool

// empty reports whether values of the schema can take no bytes, and an error if
// that makes an array dangerous or the schema is recursive.
func (s sizer) empty(schema any) (bool, error) {
	switch v := schema.(type) {
	case string:
		e, named := s[short(v)]
		if named && e == nil {
			return false, fmt.Errorf("%s is recursive", v)
		}
		return v == "null" || named && *e, nil
	case []any:
		for _, branch := range v {
			if _, err := s.empty(branch); err != nil {
				return false, err
			}
		}
		return false, nil
	case map[string]any:
		return s.emptyObject(v)
	}
	return false, nil
}

func (s sizer) emptyObject(m map[string]any) (empty bool, err error) {
	name, _ := m["name"].(string)
	name = short(name)
	switch m["type"] {
	case "record":
		s[name] = nil
		empty = true
		fields, _ := m["fields"].([]any)
		for _, f := range fields {
			field, _ := f.(map[string]any)
			e, err := s.empty(field["type"])
			if err != nil {
				return false, err
			}
			empty = empty && e
		}
		s[name] = &empty
	case "fixed":
		empty = m["size"] == 0.0
		s[name] = &empty
	case "enum":
		s[name] = &empty
	case "array":
		e, err := s.empty(m["items"])
		if err == nil && e {
			err = fmt.Errorf("items of an array take no bytes")
		}
		return false, err
	case "map":
		_, err := s.empty(m["values"])
		return false, err
	default:
		return s.empty(m["type"])
	}
	return empty, nil
}

func short(name string) string { return name[strings.LastIndexByte(name, '.')+1:] }
