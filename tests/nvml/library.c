/* Stands in for NVIDIA's libnvidia-ml.so.1: its calls answer from the file that FAKE_NVML names.

   driver|VERSION|CUDA          as in driver|580.95.05|13000
   error|CODE                   what nvmlInit returns
   card|NAME|UUID|BYTES|MAJOR.MINOR|CORES|MHZ
   split                        the last card is in MIG mode
   slice|NAME|UUID|BYTES        a slice of it; `hole` is a number that has none
*/
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK 0
#define UNINITIALIZED 1
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define DRIVER_NOT_LOADED 9

typedef struct Device {
    char name[96], uuid[96];
    unsigned long long bytes;
    int major, minor, cores, clock, split, parts;
    struct Device *part[8];
} Device;

static Device devices[64], *cards[16];
static int used, count, cuda, started;
static char driver[80];

int nvmlInitWithFlags(unsigned flags) {
    char line[512], *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    int code = OK;
    (void)flags;
    if (!file) return DRIVER_NOT_LOADED;
    memset(devices, 0, sizeof devices);
    used = count = 0;
    while (fgets(line, sizeof line, file)) {
        Device *new = &devices[used], *last = count ? cards[count - 1] : NULL;
        if (sscanf(line, "driver|%79[^|]|%d", driver, &cuda) == 2) continue;
        if (sscanf(line, "error|%d", &code) == 1) continue;
        if (sscanf(line, "card|%95[^|]|%95[^|]|%llu|%d.%d|%d|%d", new->name, new->uuid,
                   &new->bytes, &new->major, &new->minor, &new->cores, &new->clock) == 7) {
            cards[count++] = new;
            used++;
        } else if (sscanf(line, "slice|%95[^|]|%95[^|]|%llu", new->name, new->uuid,
                          &new->bytes) == 3) {
            last->part[last->parts++] = new;
            used++;
        } else if (!strncmp(line, "hole", 4)) {
            last->parts++;
        } else if (!strncmp(line, "split", 5)) {
            last->split = 1;
        }
    }
    fclose(file);
    started = code == OK;
    return code;
}

int nvmlShutdown(void) { started = 0; return OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "%s", driver);
    return OK;
}
int nvmlSystemGetCudaDriverVersion_v2(int *number) { *number = cuda; return OK; }
int nvmlDeviceGetCount_v2(unsigned *number) {
    *number = count;
    return started ? OK : UNINITIALIZED;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    *device = cards[index];
    return OK;
}
int nvmlDeviceGetName(Device *device, char *text, unsigned size) {
    snprintf(text, size, "%s", device->name);
    return OK;
}
int nvmlDeviceGetUUID(Device *device, char *text, unsigned size) {
    snprintf(text, size, "%s", device->uuid);
    return OK;
}
int nvmlDeviceGetMemoryInfo(Device *device, unsigned long long *total_free_used) {
    if (!device->bytes) return NOT_SUPPORTED;
    total_free_used[0] = total_free_used[1] = device->bytes;
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor) {
    *major = device->major;
    *minor = device->minor;
    return OK;
}
int nvmlDeviceGetNumGpuCores(Device *device, unsigned *cores) {
    *cores = device->cores;
    return device->cores ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxClockInfo(Device *device, int kind, unsigned *clock) {
    *clock = device->clock;
    return kind == 1 ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    *current = *pending = device->split;
    return device->major >= 8 && device->minor == 0 ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *number) {
    *number = device->parts;
    return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **part) {
    *part = device->part[index];
    return *part ? OK : NOT_FOUND;
}
