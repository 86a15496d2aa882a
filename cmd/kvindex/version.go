// This file tells what was built.

package main

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
)

// buildVersion is the module's version and, if there is one, the commit.
func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	version, commit, changed := info.Main.Version, "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			commit = " " + s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			changed = "+changes"
		}
	}
	return version + commit + changed
}

func versionCommand() command {
	return command{
		use:   "version",
		short: "Print the version",
		run: func(_ context.Context, con *console, _ []string) error {
			_, err := fmt.Fprintf(con.out, "kvindex %s, %s %s/%s\n", buildVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	}
}
