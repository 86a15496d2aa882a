// This file bounds what a request may ask: what is above is refused by name.

package query

import (
	"errors"
	"time"
)

// Limits bound what one request may ask. A zero field takes its default.
type Limits struct {
	MaxRequestBytes      int           // of a gRPC message or an HTTP body; default 4 MiB
	MaxTokens            int           // in a prompt; default 1,048,576
	MaxBlocks            int           // in a prompt; default 65,536
	MaxNameBytes         int           // of lora and of salt, which are hashed with every block; default 1,024
	MaxMultimodal        int           // entries of mm, which every block looks through; default 256
	MaxWorkersFilter     int           // entries of workers; default 4,096
	Deadline             time.Duration // for a request's work, if its caller set no nearer one; default 1 s
	MaxConcurrentStreams uint32        // requests at a time on one gRPC connection; default 1,024
}

// Validate reports every negative field.
func (l Limits) Validate() error {
	var errs []error
	for _, f := range []struct {
		name string
		bad  bool
	}{
		{"max request bytes", l.MaxRequestBytes < 0},
		{"max tokens", l.MaxTokens < 0},
		{"max blocks", l.MaxBlocks < 0},
		{"max name bytes", l.MaxNameBytes < 0},
		{"max multimodal entries", l.MaxMultimodal < 0},
		{"max workers filter", l.MaxWorkersFilter < 0},
		{"deadline", l.Deadline < 0},
	} {
		if f.bad {
			errs = append(errs, errors.New("query limit "+f.name+" is negative"))
		}
	}
	return errors.Join(errs...)
}

func (l Limits) withDefaults() Limits {
	setDefault(&l.MaxRequestBytes, 4<<20)
	setDefault(&l.MaxTokens, 1<<20)
	setDefault(&l.MaxBlocks, 65536)
	setDefault(&l.MaxNameBytes, 1024)
	setDefault(&l.MaxMultimodal, 256)
	setDefault(&l.MaxWorkersFilter, 4096)
	setDefault(&l.Deadline, time.Second)
	setDefault(&l.MaxConcurrentStreams, 1024)
	return l
}

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}
