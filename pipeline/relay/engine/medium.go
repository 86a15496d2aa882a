// This file turns the engines' words for kinds of memory into tiers.

package engine

import "kvindex/index"

// media are the words that engines and their own offloading code use.
var media = map[string]index.Tier{
	"GPU":        index.Device,
	"CPU":        index.Host,
	"CPU_PINNED": index.Host,
	"DISK":       index.Disk,
	"STORAGE":    index.Disk,
	"EXTERNAL":   index.External,
}

// tier returns the tier of a medium and a locality. Memory of another machine
// is external whatever it is.
func (m *Mapping) tier(medium, locality []byte) (index.Tier, bool) {
	t := index.Device
	if medium != nil {
		var ok bool
		if t, ok = m.cfg.Media[string(medium)]; !ok {
			if t, ok = media[string(medium)]; !ok {
				return 0, false
			}
		}
	}
	switch string(locality) {
	case "", "LOCAL":
		return t, true
	case "REMOTE":
		return index.External, true
	}
	return 0, false
}
