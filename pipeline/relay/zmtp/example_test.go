package zmtp_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"time"

	"kvindex/pipeline/relay/zmtp"
)

// Reading an engine's events, and asking it for those that were missed.
func Example() {
	ctx := context.Background()
	events, err := zmtp.NewSub(zmtp.DefaultConfig("tcp://engine:5557"))
	if err != nil {
		log.Fatal(err)
	}
	defer events.Close()
	cfg := zmtp.DefaultConfig("tcp://engine:5558")
	cfg.Topics = nil
	replay, err := zmtp.NewDealer(cfg)
	if err != nil {
		log.Fatal(err)
	}
	defer replay.Close()

	var next uint64
	for {
		e, err := events.Next(ctx)
		if err != nil {
			return
		}
		switch e.Kind {
		case zmtp.Connected:
			if err := missed(ctx, replay, next); err != nil {
				log.Print(err)
			}
		case zmtp.Message: // topic, sequence number, payload
			if len(e.Frames) != 3 || len(e.Frames[1]) != 8 {
				log.Printf("%d frames", len(e.Frames))
				continue
			}
			if seq := binary.BigEndian.Uint64(e.Frames[1]); seq != next {
				log.Printf("message %d, want %d", seq, next)
			}
			next++
		case zmtp.Disconnected, zmtp.Failed:
			log.Printf("%v, again at %v", e.Err, e.Retry)
		}
	}
}

// missed asks for the messages from start on.
func missed(ctx context.Context, replay *zmtp.Dealer, start uint64) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := replay.Send(ctx, nil, binary.BigEndian.AppendUint64(nil, start)); err != nil {
		return err
	}
	for {
		frames, err := replay.Recv(ctx)
		if err == nil && len(frames) < 3 { // "", topic if the engine is recent, sequence number, payload
			err = fmt.Errorf("%d frames", len(frames))
		}
		if err != nil {
			replay.Disconnect() // late answers would be taken for those to the next request
			return err
		}
		seq := frames[len(frames)-2]
		if string(seq) == "\xff\xff\xff\xff\xff\xff\xff\xff" {
			return nil
		}
		fmt.Printf("message %d again\n", binary.BigEndian.Uint64(seq))
	}
}
