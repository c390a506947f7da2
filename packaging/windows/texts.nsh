; What setup.exe and uninstall.exe say, in English and German.

!macro TEXT name english german
    LangString ${name} ${LANG_ENGLISH} "${english}"
    LangString ${name} ${LANG_GERMAN} "${german}"
!macroend

!insertmacro TEXT About \
    "Run one GGUF language model on all GPUs of a computer at once" \
    "Ein GGUF-Sprachmodell auf allen GPUs eines Computers zugleich ausführen"
!insertmacro TEXT FileType "GGUF language model" "GGUF-Sprachmodell"
!insertmacro TEXT TooOld \
    "Tandem needs Windows 10, version 1809, or newer." \
    "Tandem braucht Windows 10, Version 1809, oder neuer."
!insertmacro TEXT TooLong \
    "The path of this folder is too long for Windows. Choose one with a shorter path." \
    "Der Pfad dieses Ordners ist zu lang für Windows. Wählen Sie einen mit kürzerem Pfad."
!insertmacro TEXT IsForeignText \
    "This folder holds other files. Choose an empty one." \
    "In diesem Ordner liegen andere Dateien. Wählen Sie einen leeren."
!insertmacro TEXT IsOpen \
    "Tandem is open. OK saves your chats and closes it." \
    "Tandem ist geöffnet. OK speichert Ihre Chats und schließt es."
!insertmacro TEXT IsStillOpen \
    "Tandem is still running, perhaps in a terminal. End it there, then try again." \
    "Tandem läuft noch, vielleicht in einem Terminal. Beenden Sie es dort und versuchen Sie es erneut."
!insertmacro TEXT DoesNotStart \
    "Tandem is installed but does not start. Microsoft's Visual C++ runtime may be missing. Open its download?" \
    "Tandem ist installiert, startet aber nicht. Vielleicht fehlt die Visual-C++-Laufzeit von Microsoft. Ihren Download öffnen?"
!insertmacro TEXT TandemText "The window and the program for terminals." "Das Fenster und das Programm für Terminals."
!insertmacro TEXT GgufName "Open .gguf files with Tandem" ".gguf-Dateien mit Tandem öffnen"
!insertmacro TEXT GgufText \
    "A double-click on a model opens it. Off if another program opens such files." \
    "Ein Doppelklick auf ein Modell öffnet es. Aus, wenn ein anderes Programm solche Dateien öffnet."
!insertmacro TEXT DesktopName "Icon on the desktop" "Symbol auf dem Desktop"
!insertmacro TEXT DesktopText "Starts Tandem from the desktop." "Startet Tandem vom Desktop."
!insertmacro TEXT UnTandemText \
    "The program. Your chats, settings and models stay." \
    "Das Programm. Ihre Chats, Einstellungen und Modelle bleiben."
!insertmacro TEXT EngineName "Engine" "Engine"
!insertmacro TEXT EngineText \
    "The engine that Tandem has downloaded, up to some gigabytes. A later Tandem would download it again." \
    "Die Engine, die Tandem heruntergeladen hat, bis zu einigen Gigabyte. Ein späteres Tandem lädt sie neu herunter."
