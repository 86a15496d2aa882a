// This file finds the JDK that runs a real Kafka, and fetches its jars with Maven; errors say what to install.

package testcontainers

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// KafkaVersion is the Apache Kafka that [Native] runs; native/pom.xml names the same.
const KafkaVersion = "4.4.0"

// minJava is the oldest Java that this Kafka's broker runs on.
const minJava = 17

// ErrPrerequisite is in every error about a program that the tests need and this machine lacks. The error's text says what to
// install. It is a reason to fail a test, never to skip it.
var ErrPrerequisite = errors.New("a prerequisite of the tests is missing")

//go:embed native/pom.xml
var pomXML []byte

// fetchTimeout bounds one download of jars or Python packages.
const fetchTimeout = 5 * time.Minute

// findJava returns the java command of JAVA_HOME or of the PATH, of version 17 or later.
func findJava(ctx context.Context) (string, error) {
	const install = "install a JDK or JRE of version 17 or later (Debian, Ubuntu: apt-get install openjdk-17-jre-headless) and put java on the PATH or set JAVA_HOME"
	java := "java"
	if home := os.Getenv("JAVA_HOME"); home != "" {
		java = filepath.Join(home, "bin", "java")
	}
	path, err := exec.LookPath(java)
	if err != nil {
		return "", fmt.Errorf("%w: no java (%v): %s", ErrPrerequisite, err, install)
	}
	out, err := exec.CommandContext(ctx, path, "-version").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s -version: %v: %s: %s", ErrPrerequisite, path, err, lastLines(out, 3), install)
	}
	if v := javaMajor(string(out)); v < minJava {
		return "", fmt.Errorf("%w: %s is Java %d, Kafka %s needs %d or later: %s", ErrPrerequisite, path, v, KafkaVersion, minJava, install)
	}
	return path, nil
}

var javaVersion = regexp.MustCompile(`version "(\d+)(?:\.(\d+))?`)

// javaMajor reads the major version from the output of java -version; 0 when it has none. Java 8 calls itself 1.8.
func javaMajor(out string) int {
	m := javaVersion.FindStringSubmatch(out)
	if m == nil {
		return 0
	}
	v, _ := strconv.Atoi(m[1]) // only digits match
	if v == 1 {
		v, _ = strconv.Atoi(m[2])
	}
	return v
}

// kafkaJars returns the folder with the broker's jars (54 MB), fetched on the first call on this machine.
func kafkaJars(ctx context.Context) (string, error) {
	sum := sha256.Sum256(pomXML) // another pom is another folder
	return cached(fmt.Sprintf("kafka-%s-%x", KafkaVersion, sum[:4]), func(dir string) error {
		mvn, err := exec.LookPath("mvn")
		if err != nil {
			return fmt.Errorf("%w: no mvn, which fetches Apache Kafka %s (%v): install Apache Maven 3.6 or later (Debian, Ubuntu: apt-get install maven)",
				ErrPrerequisite, KafkaVersion, err)
		}
		ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
		defer cancel()
		pom := filepath.Join(dir, "pom.xml")
		if err := os.WriteFile(pom, pomXML, 0o644); err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, mvn, "-B", "-ntp", "-q", "-f", pom, "dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory="+dir)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("fetch Apache Kafka %s with mvn (is Maven Central or its mirror in ~/.m2/settings.xml reachable?): %w\n%s", KafkaVersion, err, lastLines(out, 15))
		}
		return nil
	})
}

// lastLines returns the last n lines of a program's output.
func lastLines(out []byte, n int) string {
	lines := strings.Split(string(bytes.TrimSpace(out)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
