# Two commands on a fresh machine with a Rust toolchain: `make demo` and `make test`. Each installs
# what it lacks, or prints the one line that does (scripts/need).

TARGET := x86_64-unknown-linux-gnu
BUILD_DIR := $(or $(CARGO_TARGET_DIR),target)
STATIC := $(BUILD_DIR)/$(TARGET)/release/zerosock

.PHONY: help demo test check fuzz bench bench-vm soak lint static install

help:
	@echo "make demo     boot a stock Linux guest, stream a file both ways, print a short table"
	@echo "              (ARGS='--json', ARGS='--file PATH', ...)"
	@echo "make test     everything: lint, unit, property, loom, Miri, integration and VM tests, examples"
	@echo "              (ARGS='lint test' runs these stages only)"
	@echo "make check    what to run before a commit: layers, prose, lint, and the tests without guests and peers"
	@echo "make fuzz     the fuzz targets, one after the other (SECONDS=60 each): docs/fuzzing.md"
	@echo "make bench    zerosock beside its peers: sockets, iceoryx2, vhost-device-vsock, socat, HAProxy, DPDK"
	@echo "              (ARGS='local', ARGS='device --rounds 9', ...)"
	@echo "make bench-vm a stock guest under QEMU, side by side with vhost-device-vsock"
	@echo "make soak     mixed traffic with kills, upgrades and reloads for long; growth fails it (MINUTES=30, ARGS='--seed 1')"
	@echo "make lint     rustfmt, clippy, rustdoc, layers of crates, prose, licences"
	@echo "make static   the static binary: $(STATIC)"
	@echo "make install  as root: the command, the units of systemd, their user, an example of vms.yaml"
	@echo "              (DESTDIR=, PREFIX=/usr/local; builds nothing that is there)"

demo:
	@scripts/need demo
	@$(MAKE) --no-print-directory static
	@$(STATIC) demo $(ARGS)

test:
	@scripts/need test
	@scripts/test $(ARGS)

check:
	@scripts/need test
	@scripts/test layers prose lint test

# Skipped where the nightly toolchain or cargo-fuzz cannot be had.
fuzz:
	@scripts/need fuzz || { echo "SKIPPED fuzz: no nightly toolchain or no cargo-fuzz"; exit 0; } && \
		scripts/fuzz $(or $(SECONDS),60)

bench:
	@scripts/need build
	cargo run --release -p zerosock-bench -- --install-peers $(or $(ARGS),local device rx hold scale relay send notify net)

bench-vm:
	@scripts/need demo
	@$(MAKE) --no-print-directory static
	@scripts/bench-vm $(ARGS)

MINUTES := 30
soak:
	@scripts/need build
	cargo build --release -p zerosock-testkit
	$(BUILD_DIR)/release/zerosock-testkit soak --minutes $(MINUTES) $(ARGS)

lint:
	@scripts/need lint
	@scripts/test layers prose lint deny

# The gnu target is named so that the flag does not reach build scripts and macros.
static:
	@scripts/need build
	RUSTFLAGS="-C target-feature=+crt-static" \
		cargo build --release --target $(TARGET) -p zerosock-cli

# The units name /usr/local/bin/zerosock; another PREFIX is put into them. A vms.yaml that is there stays.
PREFIX := /usr/local
BIN := $(DESTDIR)$(PREFIX)/bin
UNITS := $(DESTDIR)/etc/systemd/system
BINARY := $(BUILD_DIR)/release/zerosock

$(BINARY):
	@scripts/need build
	cargo build --release -p zerosock-cli

# Debug information is split off, to where debuggers and backtraces look for it.
install: $(BINARY)
	install -d $(BIN)/.debug
	objcopy --only-keep-debug $(BINARY) $(BIN)/.debug/zerosock.debug
	cd $(BIN) && objcopy --strip-all --add-gnu-debuglink=.debug/zerosock.debug $(abspath $(BINARY)) zerosock
	chmod 755 $(BIN)/zerosock
	install -d $(UNITS)
	for unit in $(notdir $(wildcard dist/*.service dist/*.socket)); do \
		sed 's,/usr/local/bin/,$(PREFIX)/bin/,' dist/$$unit > $(UNITS)/$$unit && chmod 644 $(UNITS)/$$unit || exit 1; \
	done
	install -D -m 644 dist/sysusers.conf $(DESTDIR)/usr/lib/sysusers.d/zerosock.conf
	test -e $(DESTDIR)/etc/zerosock/vms.yaml || install -D -m 644 dist/vms.yaml $(DESTDIR)/etc/zerosock/vms.yaml
	@if [ -z "$(DESTDIR)" ]; then systemd-sysusers zerosock.conf && systemctl daemon-reload; fi
