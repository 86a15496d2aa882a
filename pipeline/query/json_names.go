// This file refuses what encoding/json lets pass: a field that is there twice, of which
// it would take the last, and one whose name is right but for capitals.

package query

import (
	"reflect"
	"slices"
	"strings"
)

// The names of the fields of each kind of object.
var (
	matchNames      = namesOf[matchJSON]()
	matchManyNames  = namesOf[matchManyJSON]()
	multimodalNames = namesOf[multimodal]()
)

func namesOf[T any]() (names []string) {
	t := reflect.TypeFor[T]()
	for i := range t.NumField() {
		names = append(names, t.Field(i).Tag.Get("json"))
	}
	return names
}

// checkNames fails unless each field of a valid object is one of these, and there once.
// null passes: it is an absent object.
func checkNames(object []byte, names []string) error {
	at := skipSpace(object)
	if len(at) == 0 || at[0] != '{' {
		return nil
	}
	var seen uint64 // a bit for each of names
	for at = skipSpace(at[1:]); len(at) > 0 && at[0] == '"'; at = skipSpace(at[1:]) {
		name, value, err := fieldName(at)
		if err != nil {
			return err
		}
		i := slices.Index(names, name)
		if i < 0 {
			j := slices.IndexFunc(names, func(n string) bool { return strings.EqualFold(n, name) })
			if j < 0 {
				return invalid("unknown field %q", name)
			}
			return invalid("unknown field %q: %q is meant, it seems", name, names[j])
		}
		if seen&(1<<i) != 0 {
			return invalid("%s is there twice", name)
		}
		seen |= 1 << i
		if at = skipSpace(skipValue(value)); len(at) == 0 || at[0] != ',' {
			break
		}
	}
	return nil
}
