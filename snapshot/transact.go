package snapshot

// This file runs a writer's transactions.

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kgo"
)

// transact runs send inside a transaction and commits it. After an error the
// transaction is aborted, or the writer is no longer taken and open says that
// this is still to be done.
func (w *Writer) transact(ctx context.Context, send func() error) error {
	if err := w.cl.BeginTransaction(); err != nil {
		w.taken = false
		return fmt.Errorf("begin transaction: %w", err)
	}
	w.open, w.failed = true, nil
	err := send()
	if err == nil {
		err = w.flush(ctx)
	}
	if w.dead != nil {
		return w.dead
	}
	if err != nil {
		if abortErr := w.abort(ctx); abortErr != nil {
			w.taken = false
			err = errors.Join(err, fmt.Errorf("abort: %w", abortErr))
		}
		return err
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if err := w.cl.EndTransaction(end, kgo.TryCommit); err != nil {
		// It may have been committed. Only reading tells, after an abort.
		w.taken = false
		return fmt.Errorf("commit: %w", err)
	}
	w.open = false
	return nil
}

// abort ends a transaction that may be open. Where the outcome of a commit is
// unknown the client asks the coordinator for its next epoch instead, which
// settles it: a writer that was fenced meanwhile learns so here.
func (w *Writer) abort(ctx context.Context) error {
	if !w.open {
		return nil
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if err := w.cl.AbortBufferedRecords(end); err != nil {
		return err
	}
	if err := w.cl.EndTransaction(end, kgo.TryAbort); err != nil {
		return err
	}
	w.open = false
	return nil
}

// produce sends one record; a nil value is a tombstone. Without a hook it does
// not wait, and flush has the error: records of one partition stay in order.
func (w *Writer) produce(ctx context.Context, k key, value []byte, s Step) error {
	rec := &kgo.Record{Topic: w.cfg.Topic, Partition: w.cfg.Partition, Key: k.bytes(), Value: value}
	w.sent++
	w.bytes += int64(len(rec.Key) + len(value))
	if w.cfg.Hook == nil {
		w.cl.Produce(ctx, rec, func(rec *kgo.Record, err error) {
			if err != nil && w.failed == nil {
				w.failed = fmt.Errorf("produce %s: %w", rec.Key, err)
			}
		})
		return nil
	}
	if err := w.cl.ProduceSync(ctx, rec).FirstErr(); err != nil {
		return fmt.Errorf("produce %s: %w", rec.Key, err)
	}
	return w.step(s)
}

// flush waits until every record was acknowledged or has failed.
func (w *Writer) flush(ctx context.Context) error {
	if err := w.cl.Flush(ctx); err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	return w.failed
}

// step tells the hook what was acknowledged, and dies if it says so.
func (w *Writer) step(s Step) error {
	if w.cfg.Hook == nil {
		return nil
	}
	if err := w.cfg.Hook(s); err != nil {
		return w.die(fmt.Errorf("%w after %v: %w", ErrKilled, s.Kind, err))
	}
	return nil
}
